"""Why a case has no recorded curve."""


class NoRecording(Exception):
    """No recording holds this case, or the recording is not comparable. The message is the reason."""
