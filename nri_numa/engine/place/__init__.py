"""What one container gets: from a list, computed, or in place when it is resized."""
