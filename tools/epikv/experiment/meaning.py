"""What a report's numbers mean, and what they do not, for those who are new to them."""

from epikv.experiment import figures, reading
from epikv.v1.experiment_pb2 import ExperimentReport


def of(report: ExperimentReport) -> list[tuple[str, str]]:
    """Titles, and what is to be said."""
    control = reading.control_of(report)
    alpha = report.experiment.alpha
    wrong = figures.percent(alpha) if alpha else "5 %"
    return [
        (
            "Intervals, and why peeking is free",
            "An interval holds all values that the data do not rule out. These are sequential: the"
            f" chance that one ever leaves out the truth, at any of all looks, is {wrong} at most."
            " So look as often as you like, and stop when you have seen enough; there is no"
            " sample size to wait for. In exchange they are wider than intervals for a single"
            " look. Whether an arm differs is read off the interval of the difference: intervals"
            " of two means may overlap although the arms differ.",
        ),
        (
            "Exact, asymptotic, too early",
            "Asymptotic intervals hold as sums of many units come close to a normal distribution:"
            " well, but not to the letter. Before there are enough units nothing is said, or, of"
            " shares, exact intervals are given, which hold at any number and are wider.",
        ),
        (
            "Many comparisons",
            "The primary metric decides; its chance of a false alarm is shared out among the arms."
            f" Each other comparison is wrong with a chance of {wrong} by itself, so that among"
            " twenty of them one may be. Take those as hints, to be tested by an experiment of"
            " their own.",
        ),
        (
            "Subgroups",
            "Of ten subgroups one often looks special by chance, and a small one more than a large"
            " one. Therefore classes are fixed before the start, their intervals share one chance of"
            f" {wrong} of ever being wrong, and a verdict is given where it holds even so. That an"
            " arm is better in one subgroup and undecided in another mostly means that there are"
            " fewer units in the other. Whether the difference differs is a test of its own, with"
            f" a chance of {wrong} of its own to find what is not there; it needs far more units than"
            " the difference itself.",
        ),
        (
            "Adjusted by a covariate",
            "What was known of a unit before any arm acted explains a part of its outcome. The arms"
            " differ in that by chance alone, and taking it out leaves the difference and takes"
            " variance away. It must be something that no arm can have influenced: what came after"
            " (the shadow KL of the arm's own answers, say) would take the arm's effect out, too."
            " Where it differs between arms by more than chance nothing is adjusted.",
        ),
        (
            "Everyone and the exposed",
            "Everyone: all units by the arm they were dealt, whatever became of them (intention to"
            " treat). It tells what switching would do to the whole of your traffic. The exposed"
            " are those whose cache outgrew its budget, so that eviction could act (where an arm"
            " steers or rounds, all are); their difference is what that does to whom it concerns,"
            " and is not diluted by requests too short to be touched. If the exposed are not split"
            " as the weights say, the arm has a hand in who is exposed, and their figures compare"
            " different people.",
        ),
        (
            "Percent and percentage points",
            "From 70 % to 72 % is +2 percentage points (points, for short), and a relative lift of"
            f" 2.9 %. A lift is the difference as a share of the mean of {control}; where that"
            " mean may be 0, it has no bound.",
        ),
        (
            "p",
            "If an arm did not differ from the control at all, the p of its comparison would ever,"
            " at any look, fall below 0.05 in one experiment of twenty at most. It is not the"
            " chance that there is no difference, and says nothing of how large one is: that is"
            " what the interval is for.",
        ),
        ("Undecided", reading.MEANINGS["undecided"]),
        (
            "Differs",
            "Of some metrics, such as output_tokens, neither more nor less is better by itself. "
            + reading.MEANINGS["differs"],
        ),
        (
            "Confounded, and switchback",
            reading.switchback(report) if reading.is_switchback(report) else reading.CONFOUNDED,
        ),
        ("Shadow quality", reading.SHADOW_MEANS),
        *([("The same prompts", reading.PAIRS)] if report.HasField("pairs") else []),
        (
            "Attrition",
            "A mean is of the outcomes that came in. If those who are missing differ between arms,"
            " so may the means, without any effect. Failures, cancelled requests and missed"
            " deadlines are therefore outcomes of their own, and shares of known outcomes are"
            " told by arm.",
        ),
        (
            "Requests left out",
            "Requests that were forced into an arm, those of earlier bucket versions and those of"
            " units seen in two arms are in no figure but their counts: nobody dealt them by"
            " chance."
            + (" Those in a wash-out met two arms." if reading.is_switchback(report) else ""),
        ),
        (
            "What no figure here says",
            "Whether the effect lasts, holds for other traffic, models or budgets, or is large"
            " enough to matter to you."
            + (
                " What one window does to the next beyond its wash-out (a queue that is longer than"
                " that, a prefix cache that it fills, users who come back later) makes arms look more alike than they are."
                if reading.is_switchback(report)
                else " Units that were dealt to different arms share a machine; what an arm does to"
                " all of them is in no difference."
            ),
        ),
    ]
