"""The adaptive scaler's machinery: cuts in the backward graph, and what drives them."""
