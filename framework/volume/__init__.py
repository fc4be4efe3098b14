"""Folders and object stores behind one small interface."""
