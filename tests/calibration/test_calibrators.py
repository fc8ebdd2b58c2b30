import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from synthetic import make_table, normal

from scorecal.calibration.calibrators import constant_fit, ridge_fit, ridge_predict
from scorecal.calibration.folds import partition

PENALTIES = [10 ** (step / 2) for step in range(-6, 9)]


def test_the_constant_predictor_is_the_mean_gold_of_each_problems_train_rows():
    gold = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    train = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [2, 0, 1, 0]], dtype=torch.float64)
    assert constant_fit(gold, train).tolist() == [1.5, 4.5, 2.0]


@pytest.mark.parametrize(("signal", "noise"), [(0.3, 0.2), (0.3, 2.0), (0.0, 3.0)])
def test_ridge_regression_agrees_with_scikit_learns_at_the_penalty_that_its_folds_choose(
    signal, noise
):
    table = make_table(60, signal=signal)
    gold = table.gold + noise * normal(60, seed=7)
    features = table.logprobs.log_softmax(-1)
    dev = torch.arange(60) < 45
    parts = partition(table, dev, 5, "group", seed=0)
    x, y, train = features.numpy(), gold.numpy(), dev.numpy()
    errors = []
    for penalty in PENALTIES:
        error = 0.0
        for part in parts:
            held_out = part.numpy()
            model = make_pipeline(StandardScaler(), Ridge(penalty, solver="cholesky"))
            model.fit(x[train & ~held_out], y[train & ~held_out])
            error += np.square(model.predict(x[held_out]) - y[held_out]).sum()
        errors.append(error)
    best = PENALTIES[int(np.argmin(errors))]
    model = make_pipeline(StandardScaler(), Ridge(best, solver="cholesky")).fit(x[train], y[train])

    fitted = ridge_fit(features, gold, dev.double(), [part.double() for part in parts])
    predicted = ridge_predict(fitted, features)
    torch.testing.assert_close(predicted, torch.from_numpy(model.predict(x)), rtol=0, atol=1e-8)


def test_ridge_regression_reads_no_row_outside_its_own():
    table = make_table(40)
    features, dev = table.logprobs.log_softmax(-1), torch.arange(40) < 30
    parts = [part.double() for part in partition(table, dev, 5, "group", seed=0)]
    poisoned = table.gold.where(dev, 99.0), features.where(dev.unsqueeze(-1), 99.0)
    honest = ridge_fit(features, table.gold, dev.double(), parts)
    assert torch.equal(ridge_fit(poisoned[1], poisoned[0], dev.double(), parts), honest)


def test_a_feature_that_never_varies_gets_no_weight_to_speak_of():
    features = torch.cat([normal(30, 1, seed=0), torch.full((30, 1), -3.0).double()], -1)
    gold = 2 * features[:, 0] + 1
    train = torch.ones(30, dtype=torch.float64)
    fitted = ridge_fit(features, gold, train, [(torch.arange(30) < 10).double()])
    torch.testing.assert_close(ridge_predict(fitted, features), gold, rtol=0, atol=1e-3)
