"""What stands on plans, programs and predictions: buying, evidence, first-order steps. The core imports none of it."""
