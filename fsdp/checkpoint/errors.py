"""What is wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or incomplete; the text names the file. Nothing was loaded."""
