"""Orders of channels in which N:M keeps more of the weights, of a model that stays as it is."""
