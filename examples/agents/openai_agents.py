"""An agent of the OpenAI Agents SDK with a tool.  Usage: openai_agents.py BASE_URL [MODEL]; the address may name a
session.  Needs `pip install openai-agents`."""

import sys


def main() -> None:
    if "--help" in sys.argv:
        return print(__doc__)
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"It is sunny in {city}."

    set_tracing_disabled(True)  # it goes to OpenAI
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    model = OpenAIChatCompletionsModel(sys.argv[2] if len(sys.argv) > 2 else "demo", openai_client=client)
    agent = Agent(name="weather", instructions="Be brief.", model=model, tools=[weather])
    print(Runner.run_sync(agent, "How is the weather in Oslo?").final_output)


if __name__ == "__main__":
    main()
