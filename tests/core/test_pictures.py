import gc

import numpy as np
import pytest

from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, brought
from hybridrl.core.pictures import Picture, PictureStore, digest_of, expanded, picture_metrics

PIXELS = {"pixel_values": np.arange(6, dtype=np.uint8).reshape(2, 3), "image_grid_thw": np.array([[1, 1, 2]])}


def test_a_digest_depends_on_names_shapes_types_and_bytes_and_on_nothing_else():
    values, grid = PIXELS["pixel_values"], PIXELS["image_grid_thw"]
    others = [
        {"pixel": values, "image_grid_thw": grid},
        {"pixel_values": values.reshape(3, 2), "image_grid_thw": grid},
        {"pixel_values": values.view(np.int8), "image_grid_thw": grid},
        {"pixel_values": values + np.uint8(1), "image_grid_thw": grid},
        {"pixel_values": values, "image_grid_thw": np.array([[1, 2, 1]])},
    ]
    assert len({digest_of(PIXELS), *map(digest_of, others)}) == 6
    same = {"image_grid_thw": grid.copy(), "pixel_values": np.asfortranarray(values)}
    assert digest_of(same) == digest_of(PIXELS) and -(2**63) <= digest_of(PIXELS) < 2**63


def test_equal_pixels_are_stored_once_and_freed_with_the_last_picture_that_has_them():
    stored = []
    store = PictureStore(lambda pixels: stored.append(pixels) or f"handle {len(stored)}")
    first, second = store.add(PIXELS, 1), store.add({name: array.copy() for name, array in PIXELS.items()}, 1)
    assert first is second and len(stored) == 1
    assert store.handles([first.digest, first.digest]) == {first.digest: "handle 1"}
    digest = first.digest
    del first, second
    gc.collect()
    with pytest.raises(KeyError):
        store.handles([digest])


def test_a_prompt_has_as_many_placeholders_as_each_picture_has_tokens():
    """9 stands for a picture: 1 9 2 9 becomes 1 9 9 9 2 9, whose pictures begin at 1 and 5."""
    prompt = expanded([1, 9, 2, 9], 9, [Picture(-7, 3, None), Picture(8, 1, None)])
    assert prompt.ids == [1, 9, 9, 9, 2, 9]
    assert prompt.carried[PICTURE_DIGEST].tolist() == [-7, 8] and prompt.carried[PICTURE_DIGEST].dtype == np.int64
    assert prompt.carried[PICTURE_START].tolist() == [1, 5] and prompt.carried[PICTURE_START].dtype == np.int32
    assert expanded([1, 2], 9, []).carried == {}
    with pytest.raises(ValueError, match="places for 1 pictures, and 2 pictures"):
        expanded([1, 9], 9, [Picture(1, 1, None)] * 2)


@pytest.mark.parametrize("name", ["pictures", PICTURE_DIGEST, PICTURE_START])
def test_a_column_of_a_row_cannot_name_pictures_that_it_does_not_have(name):
    with pytest.raises(ValueError, match=f"carried.{name} follows from the pictures of a row; leave the column out"):
        brought({f"carried.{name}": [5]})


def test_metrics_count_a_picture_per_prompt_and_its_pixels_once():
    """Three prompts with two, one and no picture, of 4 and 6 tokens; PIXELS are 6 bytes and a grid of 24."""
    store = PictureStore()
    small, large = store.add(PIXELS, 4), store.add({"pixel_values": np.zeros((100, 10), np.uint8)}, 6)
    assert picture_metrics([(small, large), (small,), ()]) == {
        "pictures/per_prompt": 1.0,
        "pictures/tokens": 14 / 3,
        "pictures/gb": (6 + 24 + 1000) / 2**30,
    }
    assert picture_metrics([(), ()]) == {}
    other = store.add({"pixel_values": np.zeros((50, 10), np.uint8)}, 3)  # of an environment
    assert picture_metrics([(small,), ()], [other, other]) == {
        "pictures/per_prompt": 0.5,
        "pictures/tokens": 2.0,
        "pictures/gb": (6 + 24 + 500) / 2**30,
    }
