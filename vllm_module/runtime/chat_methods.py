"""What an LLM does with conversations: it makes prompts of them by a chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from vllm_module.base.messages import shorten
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.arguments import REQUEST_ARGUMENTS, check_type, known_arguments
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.text.chat import ChatTemplate, ContentFormat, Messages, template_of
from vllm_module.runtime.text.prompts import Prompt, Tokenization, as_list, token_ids
from vllm_module.runtime.text.template_process import TemplateProcess
from vllm_module.runtime.text_methods import Params, TextMethods


class ChatMethods(TextMethods):
    """The methods of :class:`~vllm_module.LLM` for models that answer conversations."""

    source: ModelSource
    no_chat_template: str
    _template: ChatTemplate | None
    _last_template: ChatTemplate | None = None
    _templates: TemplateProcess

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: ContentFormat = "auto",
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one or more conversations, formatted by the checkpoint's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a sequence of such lists.
            sampling_params, use_tqdm, lora_request: as for :meth:`generate`.
            chat_template: a template to use instead of the checkpoint's: its text, the path of its
                file, or the name of another one of the checkpoint's.
            add_generation_prompt: end the prompt with the beginning of the assistant's message.
            continue_final_message: have the last message continued, instead of a new one begun;
                then ``add_generation_prompt`` has to be ``False``.
            tools: descriptions of tools, in the form that the template expects.
            chat_template_kwargs: other variables of the template, such as ``enable_thinking``.
            chat_template_content_format: what the template gets as content: ``"string"``,
                ``"openai"`` (a list of parts), or by default what it shows.
            tokenization_kwargs: as for :meth:`generate`, without special tokens by default: the
                template writes them.
            options: others of vLLM, with the values that change nothing.

        Raises:
            CheckpointFormatError: the checkpoint has no chat template, or no tokenizer.
            ValueError: the template refuses all messages.

        Otherwise as :meth:`generate`: a conversation that is refused has an ``error``.

        """
        self._check("generate")
        known_arguments("LLM.chat", options, (), REQUEST_ARGUMENTS)
        items = as_list(messages, "messages")
        is_one = any(isinstance(each, Mapping) for each in items)
        conversations = [items] if is_one else items
        variables: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        check_type("tools", tools, "a list of descriptions or None", list, tuple, type(None))
        if tools is not None:
            variables["tools"] = tools
        if chat_template_kwargs is not None:
            expected = "a mapping of variables or None"
            check_type("chat_template_kwargs", chat_template_kwargs, expected, Mapping)
            variables |= chat_template_kwargs
        if chat_template_content_format not in get_args(ContentFormat):
            raise ValueError(
                "chat_template_content_format should be 'auto', 'string' or 'openai', got "
                f"{shorten(chat_template_content_format)}"
            )
        variables["content_format"] = chat_template_content_format
        most = self.engine.max_model_len - 1
        tokenization = Tokenization.of(tokenization_kwargs, most, special=False)
        template = self._chat_template(chat_template)
        prompts: list[Prompt | ValueError] = []
        for conversation in conversations:
            try:
                prompts.append(self._chat_prompt(template, conversation, variables, tokenization))
            except CheckpointFormatError:
                raise
            except ValueError as error:
                prompts.append(error)
        if lora_request is not None:
            prompts = self._with_adapters(prompts, lora_request)
        return self._generate(prompts, sampling_params, use_tqdm, tokenization)

    def chat_prompt(
        self, messages: Messages, chat_template: str | None = None, /, **variables: Any
    ) -> dict[str, Any]:
        """Format a conversation as a prompt for :meth:`generate` or :meth:`stream`.

        ``variables`` are those of the template. Raises what :meth:`chat` raises.
        """
        template, how = self._chat_template(chat_template), Tokenization(special=False)
        return self._chat_prompt(template, messages, variables, how)

    def get_chat_template(self, *, tools: bool = False) -> str | None:
        """Return the text of the chat template, or of that for conversations with tools.

        ``None`` if the checkpoint has none.
        """
        if self._template is None:
            return None
        source = self._template.source
        return self._template.named.get("tool_use", source) if tools else source

    def _chat_template(self, given: str | None) -> ChatTemplate:
        check_type("chat_template", given, "text or None", str, type(None))
        if given is not None:
            folder = getattr(self.tokenizer, "folder", self.source.folder)
            source = template_of(folder, given)
            last = self._last_template
            if last is None or last.source != source:
                last = ChatTemplate(folder, source, self._templates)
                self._last_template = last  # the next call mostly gives it again
            return last
        if self._template is None:
            raise CheckpointFormatError(self.no_chat_template)
        return self._template

    def _chat_prompt(
        self,
        template: ChatTemplate,
        messages: Messages,
        variables: Mapping[str, Any],
        tokenization: Tokenization,
    ) -> dict[str, Any]:
        text = template.render(messages, **variables)
        ids = token_ids(text, self.get_tokenizer, tokenization)
        return {"prompt": text, "prompt_token_ids": ids}
