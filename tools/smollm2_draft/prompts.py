"""First questions of conversations: forms that people use in a chat, filled with everyday subjects."""

from __future__ import annotations

import random
from collections.abc import Iterator

FORMS = (
    "What is {}?", "Explain {} in simple terms.", "Explain {} to a ten-year-old.", "How does {} work?",
    "Why does {} matter?", "Give me five facts about {}.", "List the advantages and disadvantages of {}.",
    "Write a short poem about {}.", "Write a short story about {}.", "Summarize the history of {}.",
    "What are common mistakes people make with {}?", "How can I learn more about {}?",
    "Write an email to a friend about {}.", "Tell me something surprising about {}.",
    "What should a beginner know about {}?", "Write three questions for a quiz about {}, with answers.",
    "Compare {} today with how it was a hundred years ago.", "Give me a plan for a week to get started with {}.",
    "Who is known for {}?", "Write an introduction for an article about {}.", "What are some good books about {}?",
    "Describe {} in one paragraph.", "I have ten minutes to talk about {}. What should I say?",
    "What would change in the world without {}?",
)  # fmt: skip
SUBJECTS = (
    "photosynthesis", "the water cycle", "gravity", "black holes", "the solar system", "the moon", "volcanoes",
    "earthquakes", "climate change", "renewable energy", "solar panels", "wind power", "electric cars", "batteries",
    "airplanes", "bicycles", "trains", "the internet", "artificial intelligence", "machine learning",
    "neural networks", "computers", "programming in Python", "databases", "operating systems", "computer security",
    "passwords", "encryption", "video games", "mobile phones", "the French Revolution", "ancient Rome",
    "ancient Egypt", "the Industrial Revolution", "the Renaissance", "democracy", "the printing press",
    "the Silk Road", "Paris", "Japan", "Brazil", "the Amazon rainforest", "the Sahara", "the oceans", "whales",
    "bees", "dogs", "cats", "dinosaurs", "birds", "trees", "gardening", "cooking pasta", "baking bread", "coffee",
    "tea", "chocolate", "healthy eating", "vitamins", "sleep", "exercise", "running", "yoga", "meditation",
    "swimming", "football", "chess", "music theory", "the piano", "the guitar", "jazz", "painting", "photography",
    "architecture", "poetry", "science fiction", "Shakespeare", "writing a novel", "learning a language",
    "public speaking", "job interviews", "time management", "saving money", "budgeting", "inflation",
    "the stock market", "starting a business", "marketing", "teamwork", "leadership", "negotiation", "friendship",
    "raising children", "education", "mathematics", "fractions", "algebra", "geometry", "probability", "statistics",
    "prime numbers", "the immune system", "vaccines", "the human heart", "DNA", "evolution", "atoms", "chemistry",
    "electricity", "magnets", "light", "sound", "the weather", "recycling", "cities", "traveling", "camping",
    "hiking", "moving to a new city", "pets", "the seasons", "time zones", "calendars",
)  # fmt: skip
TASKS = (
    "Write a Python function that {}.", "Is there a short Python program that {}?",
    "Show me an example of code that {}.",
)  # fmt: skip
JOBS = (
    "reverses a string", "checks whether a number is prime", "sorts a list", "counts the words in a text",
    "reads a file line by line", "computes the factorial of a number", "finds the largest number in a list",
    "removes duplicates from a list", "computes Fibonacci numbers", "checks whether a word is a palindrome",
    "merges two dictionaries", "converts Celsius to Fahrenheit", "computes the average of a list",
    "downloads a web page", "parses a date", "counts the vowels in a string",
)  # fmt: skip


def questions(seed: int) -> Iterator[str]:
    """Yields questions without end, in an order that the seed determines."""
    dice = random.Random(seed)
    while True:
        if dice.random() < 0.1:
            yield dice.choice(TASKS).format(dice.choice(JOBS))
        else:
            yield dice.choice(FORMS).format(dice.choice(SUBJECTS))
