"""Files of weights: reading runs no code, writing leaves no half, and a record says what is N:M."""
