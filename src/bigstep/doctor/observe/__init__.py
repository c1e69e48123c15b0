"""What is slipped under torch in the user's program: it looks, writes facts, and changes nothing that is computed."""
