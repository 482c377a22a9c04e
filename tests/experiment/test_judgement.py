"""The judgement of every test image is that of the evaluation."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hpctrain.data.format import ImageFile
from hpctrain.experiment.evaluation import run_evaluation
from hpctrain.experiment.judgement import judge
from tests.support.trained_run import GRIDS, TrainedRun, train
from tests.support.virtual_runs import work_virtual


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return train(tmp_path_factory.mktemp("trained"), dtype="float32", layout="single")


@pytest.mark.parametrize("grid", ["1", "1x3", "mixed 2x2"])
def test_every_rank_has_the_counts_of_the_evaluation(trained: TrainedRun, grid: str) -> None:
    ranks, overrides = GRIDS[grid]
    source = str(trained.run.path)
    (evaluation, *_) = work_virtual(ranks, trained.file, overrides, partial(run_evaluation, source=source, confusion=True))
    judgements = work_virtual(ranks, trained.file, overrides, partial(judge, source=source, most=3))
    assert evaluation.confusion is not None
    for judgement in judgements:
        for label in range(len(judgement.class_names)):
            assert judgement.confusion.of_label(label).tolist() == evaluation.confusion.of_label(label).tolist()
        assert sum(score.hits for score in judgement.confusion.scores()) == evaluation.sums.top1


def test_pictures_are_those_of_the_file_and_the_surest_come_first(trained: TrainedRun) -> None:
    ranks, overrides = GRIDS["1"]
    (judgement,) = work_virtual(ranks, trained.file, overrides, partial(judge, source=str(trained.run.path), most=1000))
    file = ImageFile.open(trained.folder / "test.h5")
    scores = judgement.confusion.scores()
    assert len(judgement.wrong) == sum(score.samples - score.hits for score in scores)
    assert len(judgement.right) == sum(score.hits > 0 for score in scores)
    assert len({image.label for image in judgement.right}) == len(judgement.right)
    for images, hits in ((judgement.right, True), (judgement.wrong, False)):
        assert all((image.label == image.prediction) is hits for image in images)
        probabilities = [image.probability for image in images]
        assert probabilities == sorted(probabilities, reverse=True)
        for image in images:
            assert image.label == file.labels[image.number]
            np.testing.assert_array_equal(image.pixels, file.images[image.number])
