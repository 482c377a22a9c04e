"""The section of the images: one word for made-up ones, and their shape within what memory takes."""

import pytest
from pydantic import ValidationError

from hpctrain.config.data_section import DataConfig, SyntheticConfig


def test_the_word_synthetic_stands_for_made_up_images_of_both_splits():
    data = DataConfig.model_validate("synthetic")
    assert (data.train, data.test) == ("synthetic", "synthetic")
    assert data == DataConfig.model_validate({"train": "synthetic", "test": "synthetic", "synthetic": {}})
    for wrong in ("train.h5", "auto"):
        with pytest.raises(ValidationError):
            DataConfig.model_validate(wrong)


@pytest.mark.parametrize("key", SyntheticConfig.model_fields)
def test_there_is_at_least_one_of_everything_and_not_too_many(key):
    assert getattr(SyntheticConfig.model_validate({key: 1}), key) == 1
    for wrong in (0, 10**9, True, 1.5):
        with pytest.raises(ValidationError):
            SyntheticConfig.model_validate({key: wrong})
