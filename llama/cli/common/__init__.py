"""What the commands share: their options, the model they load, what they read and write."""
