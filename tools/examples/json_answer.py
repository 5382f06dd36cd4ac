"""Asks for an answer that is JSON of a schema.

    python tools/examples/json_answer.py "Who wrote Dracula, and when?"

The model must be able to spell JSON. The sample model has no braces among its words: it is refused.
Any usual tokenizer will do, also that of own_model.py, whose weights are random:

    {'name': ' YsuAYmpS aTheUMOf t', 'year': 87}
"""

import json
import os
import sys

from epikv import Client, Sampling, Stop

SERVER = os.environ.get("EPIKV_SERVER", "127.0.0.1:50051")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "[A-Za-z ]{1,20}"},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
    },
    "required": ["name", "year"],
}


def main(question: str) -> None:
    sampling, stop = Sampling(json_schema=SCHEMA), Stop(max_output_tokens=200)
    with Client(SERVER) as client:
        answer = client.generate_once(question, sampling=sampling, stop=stop)
    if answer.summary is not None and answer.summary.finish_reason == "length":
        sys.exit(f"cut off after {stop.max_output_tokens} tokens: {answer.text!r}")
    print(json.loads(answer.text))


if __name__ == "__main__":
    main(sys.argv[1])
