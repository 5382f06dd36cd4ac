"""The sample model's chat template: a message is one problem, its answer the trace that solves it."""

# The model learned one problem at a time. Behind a solved one (whose lines end in `done #3 .`) it
# would repeat the answer, so the template refuses that.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- raise_exception('the sample model solves problems and follows no instructions') }}
    {%- elif message.role == 'user' %}
        {{- '<bos> ' + message.content + ' <think>' }}
    {%- elif 'done #' in message.content %}
        {{- raise_exception('the sample model solves one problem a conversation') }}
    {%- else %}
        {{- ' ' + message.content + ' <eos> ' }}
    {%- endif %}
{%- endfor %}
"""
