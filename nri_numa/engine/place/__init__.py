"""What one container gets: from a list, or computed, with its memory."""
