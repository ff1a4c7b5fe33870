"""Why a case has no recorded curve."""


class NoRecording(Exception):
    """No recording holds this case, or what it holds is not comparable; the message is the reason."""
