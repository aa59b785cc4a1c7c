"""The chat template: what other programs render conversations with, and the texts that it shares with our encoding."""

from __future__ import annotations

import json

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
RESPONSE, END_OF_RESPONSE = "<tool_response>", "</tool_response>"

# What Qwen2.5 and Qwen3 write around the signatures of tools, in pieces: those that are control tokens in their
# templates are control tokens here.
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
HOW_TO_CALL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    CALL,
    END_OF_CALL,
    " XML tags:\n",
    CALL,
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    END_OF_CALL,
)

# What transformers renders with: chat_template of tokenizer_config.json. It says what `segments` of
# stack.text.conversation says, and a test holds the two together. Nothing is stripped, and arguments that are a string
# already stand as they are, as in Qwen3's.
# Between the generation tags stands what is supervised. Renderers without them remove them in this very spelling.
TEMPLATE = (
    r"""
{{- bos_token -}}
{%- macro said(text, message) -%}
  {%- set thought = message['reasoning_content'] or message['thinking'] or message['reasoning'] -%}
  {%- if thought -%}
    {{- '<think>\n' + thought + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- text -}}
  {%- for tool_call in message['tool_calls'] or [] -%}
    {%- set call = tool_call['function'] or tool_call -%}
    {{- '<tool_call>\n{"name": ' + call['name'] | tojson + ', "arguments": ' -}}
    {{- call['arguments'] if call['arguments'] is string else call['arguments'] | tojson -}}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>' -}}
{%- endmacro -%}
{%- set functions = tools or messages[0]['tools'] -%}
{%- macro signatures() -%}
  {{- TOOLS -}}
  {%- for tool in functions -%}
    {{- '\n' + (tool if tool['function'] else {'type': 'function', 'function': tool}) | tojson -}}
  {%- endfor -%}
  {{- HOW_TO_CALL -}}
{%- endmacro -%}
{%- set one = namespace(text='') -%}
{%- if functions and messages[0]['role'] not in ['system', 'developer'] -%}
  {{- '<|im_start|>system\n' + signatures() + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set one.text = '' -%}
  {%- if message['content'] is string -%}
    {%- set one.text = message['content'] -%}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] != 'text' -%}
        {{- raise_exception('this model reads text only, not content of type ' + part['type'] | string) -}}
      {%- endif -%}
      {%- set one.text = one.text + part['text'] -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_start|>' + ('system' if message['role'] == 'developer' else message['role']) + '\n' -}}
  {%- if message['role'] == 'assistant' and message['weight'] != 0 -%}
    {% generation %}{{- said(one.text, message) -}}{% endgeneration %}
  {%- elif message['role'] == 'assistant' -%}
    {{- said(one.text, message) -}}
  {%- elif message['role'] == 'tool' -%}
    {{- '<tool_response>\n' + one.text + '\n</tool_response><|im_end|>' -}}
  {%- elif functions and loop.first and message['role'] in ['system', 'developer'] -%}
    {{- one.text + ('\n\n' if one.text else '') + signatures() + '<|im_end|>' -}}
  {%- else -%}
    {{- one.text + '<|im_end|>' -}}
  {%- endif -%}
  {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()
    .replace("HOW_TO_CALL", json.dumps("".join(HOW_TO_CALL)))
    .replace("TOOLS", json.dumps(TOOLS))
)
