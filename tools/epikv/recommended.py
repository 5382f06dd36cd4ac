"""The policies to begin with, of the many that there are: a person's choice, from what was measured.

What was measured is docs/what-policies-keep.md (shares of problems solved by small models under equal
protection) and policies/README.md (costs); a test holds the reasons against both. No ranking carries
over to another model.
"""

# By name, why each is there. Shares: of reasoning problems, with half of the trace kept.
RECOMMENDED = {
    "expected_attention": "solved the most of all: 99 %",
    "cur": "solved the most of those that are cheap and need no calibration: 97 %",
    "epikv_flat": "costs next to nothing, for flash attention stays on: 90 %",
    "random": "the control: 8 %; what is no better than this is not worth its cost",
    "full": "the reference: no eviction, 100 %; for caches that fit",
}
