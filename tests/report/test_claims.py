import dataclasses

from driveprune import recipes
from driveprune.report.claims import claims, of_paper, of_runs
from driveprune.report.groups import groups
from driveprune.report.variants import recipe_of
from tests.report.stores import run, spec_of

RUNS = [
    run("imp", 0.9, 0.94, pruning=100.0, training=5.0),
    run("imp", 0.993, 0.90, pruning=100.0, training=5.0),
    run("snip", 0.9, 0.92, pruning=0.1, training=5.0),
    run("snip", 0.993, 0.10, pruning=0.1, training=5.0, collapsed=True),
    run("drive", 0.9, 0.915, pruning=2.0, training=5.0),
    run("drive", 0.993, 0.85, pruning=2.0, training=5.0),
    run("drive", 0.993, 0.99, check="shuffle"),
]


def by_words(*words):
    return next(claim for claim in claims(groups(RUNS)) if all(word in claim.text for word in words))


def test_a_claim_holds_only_where_every_test_of_it_does():
    claim = by_words("as accurate as SNIP")
    assert claim.verdict == "did not hold"
    assert claim.summary == "held in 1 of 2"
    assert [check.verdict for check in claim.checks] == ["did not hold", "held"]
    assert claim.checks[0].numbers == "91.50 against 92.00 (−0.50)"
    assert "90%" in claim.checks[0].where


def test_what_no_run_tests_is_not_tested():
    assert by_words("as accurate as SynFlow").verdict == "not tested"
    assert by_words("AlexNet").verdict == "not tested"
    assert by_words("AlexNet").in_paper == "held in 3 of 3"
    assert {claim.verdict for claim in claims([])} == {"not tested"}


def test_the_distance_to_imp_has_a_margin_of_a_point():
    claim = by_words("IMP is at most marginally better")
    assert [check.numbers for check in claim.checks] == ["91.50 against 94.00 (−2.50)", "85.00 against 90.00 (−5.00)"]
    assert claim.verdict == "did not hold"
    edge = [run("drive", 0.9, 0.6158), run("imp", 0.9, 0.6258)]
    near = next(claim for claim in claims(groups(edge)) if "marginally" in claim.text)
    assert near.verdict == "held"  # a point, whatever the floats say
    assert by_words("IMP is at most marginally better").in_paper == "held in 22 of 32"


def test_speed_ups_stability_collapse_and_total_time():
    assert by_words("43 to 869").verdict == "held"
    assert by_words("43 to 869").checks[0].numbers == "2.00 s against 100.00 s: 50.0×"
    assert by_words("stable").checks[0].numbers == "6.50 points lost against 82.00"
    assert by_words("stable").verdict == "held"
    assert by_words("do not collapse").checks[1].numbers == "not collapsed (snip did)"
    assert by_words("comparable").verdict == "did not hold"  # 7 s against 5.1


def test_an_ablation_does_not_decide_a_claim():
    found = [run("drive", 0.9, 0.93), run("drive", 0.9, 0.5, knobs={"cuts": 1}), run("snip", 0.9, 0.92)]
    claim = next(claim for claim in claims(groups(found)) if "SNIP at each" in claim.text)
    assert claim.verdict == "held"
    assert [check.where for check in claim.checks] == ["drive cuts=100 and snip at 90%"]


def test_times_are_compared_at_common_sparsities():
    found = [
        run("imp", 0.9, 0.9, pruning=100.0),
        run("drive", 0.9, 0.9, pruning=1.0),
        run("drive", 0.98, 0.9, pruning=9.0),
    ]
    claim = next(claim for claim in claims(groups(found)) if "43 to 869" in claim.text)
    assert claim.checks[0].numbers == "1.00 s against 100.00 s: 100.0×"


def test_sanity_checks_are_no_evidence():
    (group,) = groups(RUNS)
    assert of_runs(group).of("drive") == ["drive"]


def test_the_papers_own_numbers_are_tested_alike():
    assert len(of_paper()) == 8
    found = {claim.text: claim.in_paper for claim in claims([])}
    assert found["DRIVE is at least as accurate as SNIP at each sparsity"] == "held in 31 of 32"
    assert found["DRIVE is at least as accurate as SynFlow at each sparsity"] == "held in 32 of 32"
    assert found["DRIVE obtains its sparse network 43 to 869 times faster than IMP"] == "held in 8 of 8"


def test_the_variant_of_the_recipe_stands_for_a_method_whatever_else_is_run():
    """The package's defaults are no ablation's ticket: the demo's DRIVE cuts after one epoch, the default is five."""
    demo = recipes.get("demo-digits")
    snip, drive = run("snip", 0.9, 0.95, recipe=demo), run("drive", 0.9, 0.90, recipe=demo)

    def verdict(found):
        claim = next(claim for claim in claims(groups(found)) if "SNIP at each" in claim.text)
        return claim.verdict, claim.variants

    said = "drive (as in recipe demo-digits: early_epochs 1, cuts 100) · snip (as in recipe demo-digits)"
    assert verdict([snip, drive]) == ("did not hold", said)
    for early in (5.0, 3.0):
        ablation = [run("drive", 0.9, 0.99, recipe=demo, knobs={"early_epochs": early}, seed=s) for s in range(4)]
        assert verdict([snip, drive, *ablation]) == ("did not hold", said)
        assert verdict([*ablation, snip, drive]) == ("did not hold", said)
    other = [run("drive", 0.9, 0.99, recipe=demo, knobs={"early_epochs": 3.0})]
    assert verdict([snip, *other]) == (
        "held",
        said.replace("drive (as in", "drive (not as in").replace("epochs 1", "epochs 3"),
    )


def test_a_recipe_is_known_in_its_proportions_and_with_a_model_of_ones_own():
    strong = recipes.scaled(recipes.get("strong-vgg16-cifar10"), epochs=16, width=0.5, images=1000)
    for recipe in (strong, dataclasses.replace(strong, data="digits", model="mine.net")):
        name, found = recipe_of(spec_of("snip", recipe=strong).to_json() | {"recipe": recipe.to_json()})
        assert name.startswith("strong-")
        assert found.knobs["drive"]["early_epochs"] == strong.knobs["drive"]["early_epochs"]
    odd = dataclasses.replace(strong, data="digits", model="mine.net", rate=0.77).to_json()
    assert recipe_of({"recipe": odd}) is None
    assert recipe_of({"recipe": {**odd, "epochs": 0}}) is None
