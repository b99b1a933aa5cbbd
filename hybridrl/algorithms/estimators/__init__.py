"""Advantage estimators: from a step's rewards to the advantage of each response token.

An estimator sees the rows of the whole step with `token_rewards` filled; a row's score is the sum of its token rewards.
It returns advantages and returns [response tokens] as float32, 0 on tokens that the policy did not write.
"""
