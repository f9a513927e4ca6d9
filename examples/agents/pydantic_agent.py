"""An agent of pydantic-ai with a tool.  Usage: pydantic_agent.py BASE_URL [MODEL]; the address may name a session.
Needs `pip install 'pydantic-ai-slim[openai]'`."""

import sys


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
    agent = Agent(OpenAIChatModel(sys.argv[2] if len(sys.argv) > 2 else "demo", provider=provider))

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"It is sunny in {city}."

    print(agent.run_sync("How is the weather in Oslo?").output)


if __name__ == "__main__":
    main()
