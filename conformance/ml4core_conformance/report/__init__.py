"""Result files rendered for people and for other tools."""
