"""The one error of this package."""


class RooflineError(ValueError):
    """The user asked what cannot be: what was wrong, the number, the limit, and what to try."""
