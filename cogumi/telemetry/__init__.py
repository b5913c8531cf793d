"""What a run writes of itself while it trains, and what is read of it."""
