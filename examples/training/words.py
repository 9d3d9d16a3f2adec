"""The values that fill the demo prompts: cities, names, products and years, one disjoint list per split.

No value is in both splits; `tests/examples/test_tasks.py` checks this.
"""

from __future__ import annotations

from dataclasses import dataclass

from examples.training.task import Split


@dataclass(frozen=True)
class Words:
    """The values one split may use."""

    cities: tuple[str, ...]
    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    products: tuple[str, ...]
    years: tuple[int, ...]


def split_list(text: str, separator: str = ",") -> tuple[str, ...]:
    """The items of a list in one text."""
    return tuple(item.strip() for item in text.split(separator))


TRAIN = Words(
    cities=split_list(
        "Lisbon, Oslo, Madrid, Chicago, Hamburg, Vienna, Boston, Nairobi, Kyoto, Lima, Dublin, Toronto, Seattle, "
        "Prague, Athens, Cairo, Denver, Bristol, Lyon, Milan, Warsaw, Porto, Geneva, Austin, Mumbai, Jakarta, "
        "Bergen, Leeds, Naples, Havana, Quito, Zurich, Ghent, Malmo, Perth, Santa Fe, New Delhi, Cape Town"
    ),
    first_names=split_list(
        "Anna, Ben, Carla, David, Elena, Farid, Grace, Hugo, Irene, Jonas, Kira, Liam, Maria, Nils, Olga, Pedro, "
        "Rosa, Samir, Tina, Umar, Vera, Walter, Yusuf, Zoe, Alice, Boris, Chloe, Dario, Emil, Fatima, George, Hana, "
        "Ivan, Julia, Karim, Laura, Miguel, Nora, Oscar, Priya"
    ),
    last_names=split_list(
        "Adams, Becker, Costa, Dalton, Evans, Fischer, Garcia, Haddad, Ibrahim, Jensen, Kowalski, Larsen, Meyer, "
        "Novak, Ortiz, Patel, Quinn, Rossi, Schmidt, Tanaka, Urban, Vargas, Weber, Young, Ziegler, Okafor, Berg, "
        "Carter, Dupont, Ferrari, Hughes, Moreau"
    ),
    products=split_list(
        "lamp, keyboard, desk, chair, kettle, backpack, notebook, monitor, blender, guitar, camera, tent, bicycle, "
        "mirror, toaster, printer, sofa, drill, helmet, clock, radio, carpet, bottle, jacket, coffee grinder, "
        "rice cooker, garden hose, phone case, desk fan, tea set, water filter, yoga mat, bread knife, wall map"
    ),
    years=(2012, 2013, 2015, 2016, 2017, 2019, 2020, 2022, 2023),
)

HELDOUT = Words(
    cities=split_list("Berlin, Paris, Helsinki, Tokyo, Sydney, Bogota, Krakow, Dallas, Turin, Cork, Accra, San Jose"),
    first_names=split_list("Marta, Peter, Sofia, Thomas, Leila, Victor, Clara, Andre, Ruth, Simon, Ingrid, Diego"),
    last_names=split_list("Klein, Lopez, Hansen, Silva, Baker, Nguyen, Romano, Walsh, Keller, Sato, Brandt, Murphy"),
    products=split_list(
        "pillow, vase, scooter, speaker, umbrella, hammer, tablet, blanket, desk lamp, frying pan, cookie jar, "
        "travel mug"
    ),
    years=(2014, 2018, 2021),
)


def words(split: Split) -> Words:
    """The value lists of one split."""
    return TRAIN if split == "train" else HELDOUT
