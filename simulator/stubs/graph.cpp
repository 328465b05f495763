// Only its presence is required: no symbol of it is used.
