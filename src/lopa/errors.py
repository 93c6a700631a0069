"""Errors a user can act on: one line that says what is wrong and what to do about it.

The command line prints these without a traceback; anything else that escapes is a bug of ours.
"""


class LopaError(Exception):
    """Base of every error that is the caller's to mend."""


class ConfigError(LopaError, ValueError):
    """A setting is out of range, contradicts another, or is not used by the chosen decoder."""


class PromptError(LopaError, ValueError):
    """The prompt cannot be decoded: empty, too long, or of the wrong kind."""


class CheckpointError(LopaError):
    """A model folder, adapter or tokenizer cannot be read as what it claims to be."""


class DeviceError(LopaError):
    """The requested device or precision does not exist here."""


class CapacityError(LopaError):
    """A request needs more cache than there is, or than is free now."""


class RankError(LopaError):
    """Another rank is gone, too slow, or computes something else."""
