"""The tiny model on a subject: what the checks of stages, models and systems run."""
