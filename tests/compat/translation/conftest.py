from tests.config import conftest as configs

Load, Loaded, load, needed = configs.Load, configs.Loaded, configs.load, configs.needed
a_machine_without_gpus = configs.a_machine_without_gpus
