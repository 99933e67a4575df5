"""What a pack holds, for people: the HTML page, the pictures and the model card."""
