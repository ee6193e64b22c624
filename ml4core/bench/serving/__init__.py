"""What a server does under load, as its clients see it."""
