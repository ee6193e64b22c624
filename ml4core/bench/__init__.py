"""What ``ml4 bench`` measures: each part is a module that returns figures and prints nothing."""
