import time

from hybridrl.tracking import Stopwatch


def test_seconds_of_one_name_add_up_until_they_are_taken():
    watch = Stopwatch()
    for _ in range(2):
        with watch("gen"):
            time.sleep(0.01)
    with watch("adv"):
        pass
    taken = watch.take()
    assert list(taken) == ["timing_s/gen", "timing_s/adv"]
    assert taken["timing_s/gen"] >= 0.02 > taken["timing_s/adv"] >= 0
    assert watch.take() == {}
