"""Chat templates for tests, with the constructs that published families' templates have."""

# Qwen2.5 with `default`; without, ChatML.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
CHATML_DEFAULT = (
    """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
"""
    + CHATML
)

# Llama 3.1 and 3.2: a date, contents trimmed, a system block in any case.
LLAMA3 = """\
{{- bos_token }}
{%- if not today is defined %}
    {%- set today = strftime_now("%d %b %Y") if strftime_now is defined else "1 Jan 2024" %}
{%- endif %}
{%- set told = "" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set told = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nKnows until: 2023\\nToday: " + today + "\\n\\n" + told + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}"""

# Gemma 2 refuses system messages and messages out of turn.
GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role here') }}\
{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Take turns') }}\
{% endif %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

# Gemma 3 puts the system message, untrimmed, before the first user message, trimmed.
GEMMA3 = """\
{{ bos_token }}
{%- set ahead = "" -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set ahead = messages[0]['content'] + '\\n\\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + (ahead if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<turn>model\\n' }}
{%- endif -%}"""

# Mistral before v7: the system message goes with the last user message, if that is the last.
MISTRAL_V3 = """\
{%- if messages[0]["role"] == "system" %}
    {%- set told = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and told is defined %}
            {{- "[INST] " + told + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

# The first Mistral: system messages are out of turn.
MISTRAL_V1 = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}\
{% endfor %}"""

MISTRAL_V7 = """\
{%- set today = strftime_now("%Y-%m-%d") %}
{%- if messages[0]["role"] == "system" %}
    {%- set told = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set told = "You are a model. Today is " + today + "." %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token + "[SYSTEM_PROMPT]" + told + "[/SYSTEM_PROMPT]" }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- else %}
        {{- message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Phi-3 leaves an empty system message out, and closes with a token where nothing is to come.
PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}\
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}\
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}\
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """\
{% for message in messages %}{% if message['role'] in ['system', 'user'] %}\
{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}\
{% else %}{{ '<|im_start|>assistant<|im_sep|>' }}{% generation %}\
{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

# OLMo 2: a last answer ends otherwise than one that is followed.
OLMO2 = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + '\\n' }}
{% elif message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + '\\n' }}
{% elif message['role'] == 'assistant' %}
{% if not loop.last %}
{{ '<|assistant|>\\n' + message['content'] + eos_token + '\\n' }}
{% else %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{% endif %}
{% endfor %}"""

# SmolLM3: modes of reasoning, which a system message may switch; a date; a system block in any case.
SMOLLM3 = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
    {%- set told = messages[0].content -%}
    {%- if "/no_think" in told -%}
        {%- set mode = "/no_think" -%}
    {%- elif "/think" in told -%}
        {%- set mode = "/think" -%}
    {%- endif -%}
    {%- set told = told.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\nToday: " ~ strftime_now("%d %B %Y") ~ "\\nMode: " ~ mode ~ "\\n\\n" -}}
{%- if told -%}
    {{- told + "\\n\\n" -}}
{%- elif mode == "/think" -%}
    {{- "Think first, in <think> and </think>.\\n\\n" -}}
{%- else -%}
    {{- "Be brief.\\n\\n" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {%- set lead = "" if mode == "/think" else "<think>\\n\\n</think>\\n" -%}
        {{ "<|im_start|>assistant\\n" + lead + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n" + ("" if mode == "/think" else "<think>\\n\\n</think>\\n") }}
{%- endif -%}"""

# DeepSeek-R1-Distill: answers lose their thinking; the model is made to think.
R1_DISTILL = """\
{%- set ns = namespace(told='') %}{%- for message in messages %}\
{%- if message['role'] == 'system' %}{% set ns.told = message['content'] %}{%- endif %}\
{%- endfor %}{{ bos_token }}{{ ns.told }}{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<|Assistant|>' + content + '<|end|>' }}{%- endif %}{%- endfor -%}\
{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

# Qwen3: thinking is dropped before the last question, which is the last user message that is no
# tool's response; without thinking the model is given an empty one.
QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Granite 3: a default system message with a date, which thinking extends.
GRANITE3 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set told = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set told = "Today's Date: " + strftime_now('%B %d, %Y') + ".\\nYou are Granite." %}
    {%- if thinking %}
        {%- set told = told + " Write your thoughts first." %}
    {%- endif %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|role|>system<|/role|>' + told + '<|end|>\\n' }}
{%- for message in rest %}
    {{- '<|role|>' + message['role'] + '<|/role|>' + message['content'] + '<|end|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|role|>assistant<|/role|>' }}
    {%- endif %}
{%- endfor %}"""

# GLM: of thinking, an empty one is left in history; answers are trimmed, and of an empty one not
# even the line is left.
THINKING_LEFT_EMPTY = """\
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>\\n<think></think>' }}
        {{- '\\n' + content.strip() if content.strip() else '' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}"""
