"""Storage writer and reader for plain `torch.distributed.checkpoint`: names are loaded when first used."""
