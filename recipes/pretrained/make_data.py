"""Make the data of recipes/pretrained: a question for the capital of each country, a fifth of the countries held out.

The prompts are texts, without a chat template, as a pretrained model continues text.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPT = "Question: What is the capital of {}?\nAnswer:"
HELD_OUT = 32
# Countries of more than a million people whose capital is their largest city, as a small model knows no others well,
# and is not the country's name with "City"; without Georgia, which is also a state. The name, and its capital in the
# spellings that count as right.
CAPITALS = """
Afghanistan: Kabul; Albania: Tirana; Algeria: Algiers/Alger; Angola: Luanda; Argentina: Buenos Aires; Armenia: Yerevan
Austria: Vienna; Azerbaijan: Baku; Bahrain: Manama; Bangladesh: Dhaka; Belarus: Minsk; Belgium: Brussels
Bosnia and Herzegovina: Sarajevo; Botswana: Gaborone; Bulgaria: Sofia; Burkina Faso: Ouagadougou; Cambodia: Phnom Penh
the Central African Republic: Bangui; Chad: N'Djamena; Chile: Santiago; Colombia: Bogota; Costa Rica: San Jose
Croatia: Zagreb; Cuba: Havana; Cyprus: Nicosia; the Czech Republic: Prague
the Democratic Republic of the Congo: Kinshasa; Denmark: Copenhagen; the Dominican Republic: Santo Domingo
Egypt: Cairo; El Salvador: San Salvador; Eritrea: Asmara; Estonia: Tallinn; Ethiopia: Addis Ababa; Finland: Helsinki
France: Paris; Gabon: Libreville; Germany: Berlin; Ghana: Accra; Greece: Athens; Guinea-Bissau: Bissau
Guinea: Conakry; Haiti: Port-au-Prince; Honduras: Tegucigalpa; Hungary: Budapest; Indonesia: Jakarta; Iran: Tehran
Iraq: Baghdad; Ireland: Dublin; Italy: Rome; Jamaica: Kingston; Japan: Tokyo; Jordan: Amman; Kenya: Nairobi
Kyrgyzstan: Bishkek; Laos: Vientiane; Latvia: Riga; Lebanon: Beirut; Lesotho: Maseru; Liberia: Monrovia
Libya: Tripoli; Lithuania: Vilnius; Madagascar: Antananarivo; Malawi: Lilongwe; Malaysia: Kuala Lumpur; Mali: Bamako
Mauritania: Nouakchott; Mauritius: Port Louis; Moldova: Chisinau; Mongolia: Ulaanbaatar/Ulan Bator; Mozambique: Maputo
Namibia: Windhoek; Nepal: Kathmandu; the Netherlands: Amsterdam; Nicaragua: Managua; Niger: Niamey
North Korea: Pyongyang; North Macedonia: Skopje; Norway: Oslo; Oman: Muscat; Papua New Guinea: Port Moresby
Paraguay: Asuncion; Peru: Lima; Poland: Warsaw; Portugal: Lisbon; Qatar: Doha; the Republic of the Congo: Brazzaville
Romania: Bucharest; Russia: Moscow; Rwanda: Kigali; Saudi Arabia: Riyadh; Senegal: Dakar; Serbia: Belgrade
Sierra Leone: Freetown; Slovakia: Bratislava; Slovenia: Ljubljana; Somalia: Mogadishu; South Korea: Seoul
South Sudan: Juba; Spain: Madrid; Sweden: Stockholm; Syria: Damascus; Tajikistan: Dushanbe; Thailand: Bangkok
Togo: Lome; Tunisia: Tunis; Turkmenistan: Ashgabat; Uganda: Kampala; Ukraine: Kyiv/Kiev; the United Kingdom: London
Uruguay: Montevideo; Uzbekistan: Tashkent; Venezuela: Caracas; Yemen: Sanaa/Sana'a; Zambia: Lusaka; Zimbabwe: Harare
"""


def capitals() -> dict[str, str]:
    """Return what is right for each country: spellings that are separated by a slash."""
    entries = (entry.split(": ") for line in CAPITALS.strip().splitlines() for entry in line.split("; "))
    return {country: names for country, names in entries}


def rows(split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of "train" or "val"; the hash of a country decides, so that no seed moves one."""
    by_hash = sorted(capitals().items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    for country, names in by_hash[:HELD_OUT] if split == "val" else by_hash[HELD_OUT:]:
        yield {
            "data_source": "capitals",
            "prompt": PROMPT.format(country),
            "reward_model": {"style": "rule", "ground_truth": names},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the questions of recipes/pretrained.")
    parser.add_argument("--out", type=Path, default=Path("outputs/pretrained/data"), help="directory to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(split)))
    print(f"{out}: train.jsonl ({len(capitals()) - HELD_OUT} countries), val.jsonl ({HELD_OUT} held out)")


if __name__ == "__main__":
    main()
