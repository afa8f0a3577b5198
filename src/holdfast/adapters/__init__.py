"""Other people's front doors: interfaces of other libraries, with Holdfast's checkpoints behind them."""
