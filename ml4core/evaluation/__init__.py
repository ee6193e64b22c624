"""How good a model is: what `ml4 eval` measures."""
