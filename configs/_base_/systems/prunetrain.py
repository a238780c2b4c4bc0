"""PruneTrain: channels removed every 5 epochs, the official code's interval."""

sparsity = dict(strategy="prunetrain", interval=5)
