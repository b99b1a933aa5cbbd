"""Policy losses: from the log-probs of sampled tokens to a loss per token.

Called with the log-probs of the response tokens and their rows, each of them complete, a policy loss returns the loss
per token and statistics per token without gradient, which are averaged over the tokens that the policy wrote. It knows
neither how tokens are averaged nor importance weights: the caller multiplies by both and sums. In the docstrings A, p
and r are a token's advantage, its probability and the ratio of that to the old probability.
"""
