"""Pictures of what an encoder sees and how its training went."""
