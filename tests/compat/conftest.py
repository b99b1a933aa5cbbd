from tests.agents.environments import conftest as environments
from tests.doctor import conftest as doctors
from tests.rewards import conftest as rewards

tokenizer, tokenizer_of = environments.tokenizer, environments.tokenizer_of
doctor, temporary_files = doctors.doctor, doctors.temporary_files
reward_config = rewards.reward_config
