"""What several of the commands in scripts/ use. Nothing here imports one of them."""
