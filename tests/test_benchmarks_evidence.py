"""The tasks of the evidence: their measures on cases computed by hand, and what their data are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.evidence.tasks import digits, grpo, measures, sequences
from benchmarks.evidence.tasks.measures import Boxes
from benchmarks.evidence.tasks.pictures import DigitImages, targets_of, truth_of

CPU = torch.device("cpu")
SQUARE = [0.0, 0.0, 10.0, 10.0]


def boxes(*found: tuple[list[float], int, float]) -> Boxes:
    corners, labels, scores = zip(*found, strict=True) if found else ((), (), ())
    return Boxes(
        np.array(corners, dtype=float).reshape(-1, 4),
        np.array(labels, dtype=int),
        np.array(scores, dtype=float),
    )


# Detection.


def test_overlap_of_squares():
    others = np.array([SQUARE, [5.0, 0.0, 15.0, 10.0], [20.0, 20.0, 30.0, 30.0]])
    assert measures.overlap(np.array([SQUARE]), others)[0] == pytest.approx([1, 1 / 3, 0])


def test_average_precision_by_hand():
    # Two true boxes. In the order of scores: hit, miss, hit. Precision at recall 1/2 is 1, and
    # at recall 1 it is 2/3: area 1/2 + 1/2 * 2/3.
    true = [boxes((SQUARE, 1, 1.0), ([50.0, 50.0, 60.0, 60.0], 1, 1.0))]
    found = [
        boxes(
            ([50.0, 50.0, 60.0, 61.0], 1, 0.5),
            ([80.0, 80.0, 90.0, 90.0], 1, 0.7),
            (SQUARE, 1, 0.9),
        )
    ]
    assert measures.mean_average_precision(found, true) == pytest.approx(5 / 6)


def test_a_second_box_on_the_same_digit_is_a_miss():
    true = [boxes((SQUARE, 1, 1.0), ([50.0, 50.0, 60.0, 60.0], 1, 1.0))]
    twice = [boxes((SQUARE, 1, 0.9), (SQUARE, 1, 0.8))]
    assert measures.mean_average_precision(twice, true) == pytest.approx(0.5)
    late = [boxes((SQUARE, 1, 0.9), (SQUARE, 1, 0.8), ([50.0, 50.0, 60.0, 60.0], 1, 0.7))]
    assert measures.mean_average_precision(late, true) == pytest.approx(0.5 + 0.5 * 2 / 3)


def test_scores_are_ranked_over_all_images():
    true = [boxes((SQUARE, 1, 1.0)), boxes((SQUARE, 1, 1.0))]
    wrong = [30.0, 30.0, 40.0, 40.0]
    found = [boxes((SQUARE, 1, 0.3)), boxes((wrong, 1, 0.9), (SQUARE, 1, 0.8))]
    # Miss, hit, hit: the best precision from either recall on is 2/3.
    assert measures.mean_average_precision(found, true) == pytest.approx(2 / 3)


def test_classes_count_alike_and_those_without_truth_not():
    true = [boxes((SQUARE, 1, 1.0), (SQUARE, 2, 1.0))]
    found = [boxes((SQUARE, 1, 0.9), (SQUARE, 3, 0.9))]
    assert measures.mean_average_precision(found, true) == pytest.approx(0.5)
    assert measures.mean_average_precision([boxes()], true) == 0.0


def test_an_overlap_of_just_a_half_counts():
    true = [boxes((SQUARE, 1, 1.0))]
    half = [boxes(([0.0, 0.0, 10.0, 20.0], 1, 0.9))]
    less = [boxes(([0.0, 0.0, 10.0, 20.1], 1, 0.9))]
    assert measures.mean_average_precision(half, true) == 1.0
    assert measures.mean_average_precision(less, true) == 0.0


# The other measures.


def test_mean_overlap_by_hand():
    true = torch.tensor([0, 0, 0, 1, 1, 2])
    found = torch.tensor([0, 0, 1, 1, 1, 0])
    counts = measures.confusion(found, true, 4)
    assert counts[0].tolist() == [2, 1, 0, 0]
    # Background 2 of 4, class 1 2 of 3, class 2 0 of 1; class 3 does not occur.
    assert measures.mean_overlap(counts) == pytest.approx((2 / 4 + 2 / 3 + 0) / 3)


@pytest.mark.parametrize(
    ("guess", "truth", "wanted"),
    [([], [1, 2], 2), ([1, 2], [], 2), ([1, 3], [1, 2], 1), ([1, 2, 3], [1, 3], 1), ([5], [5], 0)],
)
def test_edits(guess: list[int], truth: list[int], wanted: int):
    assert measures.edits(guess, truth) == wanted


def test_error_rate_is_for_each_true_symbol():
    assert measures.error_rate([[1, 2, 3], []], [[1, 2], [4, 4]]) == pytest.approx(3 / 4)


def test_ctc_frames_are_read_with_repetitions_and_blanks():
    assert measures.read_ctc([0, 3, 3, 0, 3, 5, 5, 0]) == [3, 3, 5]
    assert measures.read_ctc([7, 7]) == [7]
    assert measures.read_ctc([0, 0]) == []


def test_sliced_distance_of_a_shift():
    points = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    assert measures.sliced_distance(points, points[torch.randperm(50)]) == 0
    # In one dimension it is the distance itself.
    assert measures.sliced_distance(points, points + 2.5) == pytest.approx(2.5)


# Data.


def test_the_digits_are_sklearns_and_split_once_for_all():
    datasets = pytest.importorskip("sklearn.datasets")
    train, held_out = digits.load(False), digits.load(True)
    assert (len(train.labels), len(held_out.labels)) == (1437, 360)
    theirs = datasets.load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    ours = torch.cat([held_out.images, train.images])
    assert torch.equal(ours, torch.tensor(theirs.images).float()[order] / 16)
    labels = torch.cat([held_out.labels, train.labels])
    assert torch.equal(labels, torch.tensor(theirs.target)[order])


def test_a_digit_is_pasted_into_its_box():
    box = torch.tensor([[10.0, 20.0, 26.0, 36.0]])
    pasted = digits.paste(torch.ones(1, 8, 8), box, 64)
    assert pasted.shape == (1, 64, 64)
    assert (pasted[0, 21:35, 11:25] == 1).all()
    outside = pasted.clone()
    outside[0, 19:37, 9:27] = 0
    assert not outside.any()


def test_scenes_hold_what_their_boxes_say():
    scenes = digits.make_scenes(12, 64, CPU, held_out=True)
    again = digits.make_scenes(12, 64, CPU, held_out=True)
    assert all(torch.equal(a, b) for a, b in zip(scenes, again, strict=True))
    there = scenes.labels >= 0
    assert there.any(1).all()
    assert (scenes.boxes >= 0).all()
    assert (scenes.boxes <= 64).all()
    for scene in range(12):
        inside = torch.zeros(64, 64, dtype=torch.bool)
        for box, label in zip(scenes.boxes[scene], scenes.labels[scene].tolist(), strict=True):
            left, top, right, bottom = box.round().int().tolist()
            inside[max(top - 1, 0) : bottom + 1, max(left - 1, 0) : right + 1] = True
            part = scenes.classes[scene, top:bottom, left:right]
            assert (label + 1 in part.unique().tolist()) or label < 0
        assert not scenes.classes[scene][~inside].any()


def test_targets_leave_out_empty_slots():
    scenes = digits.make_scenes(5, 64, CPU, held_out=False)
    counts = (scenes.labels >= 0).sum(1).tolist()
    targets, truth = targets_of(scenes, CPU), truth_of(scenes)
    assert [len(target["boxes"]) for target in targets] == counts
    for target, boxes_ in zip(targets, truth, strict=True):
        assert target["labels"].tolist() == boxes_.labels.tolist()
        assert np.array_equal(target["boxes"].numpy(), boxes_.boxes)
    assert measures.mean_average_precision(truth, truth) == 1.0


def test_batches_depend_on_the_seed_alone():
    def drawn(seed: int) -> torch.Tensor:
        task = DigitImages(CPU, seed, 4, torch.float16, pixels=16)
        return torch.stack([task.draw(torch.nn.Identity())[0] for _ in range(2)])

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


def test_denoising_hides_and_reveals_the_same_bytes():
    stretches = torch.arange(2 * 21).view(1, 2, 21)
    begin = torch.tensor([[[0], [18]]])
    marks = sequences.BYTES + torch.arange(2).view(1, 2, 1)
    shown = sequences.hide(stretches, begin, marks)[0].tolist()
    said = sequences.reveal(stretches, begin, marks)[0].tolist()
    assert shown == [256, *range(3, 21), *range(21, 39), 257]
    assert said == [256, 0, 1, 2, 257, 39, 40, 41, 258]
    assert sequences.tokens_of(42) == 259


def test_a_tone_has_the_two_frequencies_of_its_key():
    samples = sequences.RATE
    symbols = torch.tensor([[6, 1, 1, 1, 1]])  # the digit 5
    loud = torch.tensor([[1.0, 0, 0, 0, 0]])
    begin, length = torch.zeros(1, 5), torch.full((1, 5), float(samples))
    sound = sequences.synthesize(
        symbols, begin, length, torch.ones(1, 5), loud, torch.zeros(1, samples)
    )
    seen = sequences.spectrogram(sound)
    assert seen.shape == (1, sequences.BINS, sequences.FRAMES)
    assert seen.std() == pytest.approx(1, abs=1e-4)
    middle = seen[0, :, 50].topk(2).indices
    assert sorted((40 * middle).tolist()) == pytest.approx([770, 1336], abs=20)
    peaks = torch.fft.rfft(sound[0]).abs().topk(2).indices * sequences.RATE / samples
    assert sorted(peaks.tolist()) == pytest.approx([770, 1336], abs=2)


def test_reward_of_counting():
    tokens = torch.tensor([[7, 4, 1, 5, 9], [7, 4, 1, 5, 15], [0, 0, 1, 1, 1]])
    assert grpo.reward(tokens).tolist() == pytest.approx([1, 2 / 3, 0])


def test_mismatch_is_no_negative_number_and_zero_where_both_agree():
    assert grpo.mismatch(torch.zeros(3)) == 0
    ahead = torch.tensor([0.1, -0.1])
    wanted = ((ahead.exp() - 1) - ahead).mean()
    assert grpo.mismatch(ahead) == pytest.approx(wanted)
    assert wanted > 0
