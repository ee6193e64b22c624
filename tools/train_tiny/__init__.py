"""Training of `ml4-tiny`, the small checkpoint of true architecture that the project ships."""
