"""The callbacks of a run made from Python are those of the config."""

from __future__ import annotations

from framework.callbacks import default_callbacks
from framework.callbacks.promises import broken
from framework.config import build_callbacks, compose


def test_python_and_config_have_the_same_defaults() -> None:
    configured, made = build_callbacks(compose(["+recipe=toy"])), default_callbacks()
    assert list(configured) == list(made)
    for name, callback in configured.items():
        assert type(callback) is type(made[name])
        plain = {key: value for key, value in vars(callback).items() if isinstance(value, str | int | float | None)}
        assert plain == {key: vars(made[name])[key] for key in plain}


def test_a_removed_callback_is_named_with_what_no_longer_holds() -> None:
    callbacks = default_callbacks()
    assert broken(callbacks) == []
    del callbacks["rng_state"]
    (line,) = broken(callbacks)
    assert "RNGStateCallback" in line and "random numbers" in line
