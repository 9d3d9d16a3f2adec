"""A generated data set for `model: "auto"`: fifty descriptions of adapters (`TOPICS`) and ten prompts for each.

Prompts follow a fixed rule: each topic has five things that its description does not name, and two of the ten question
templates are filled in with each thing. Prompts of topics that no adapter describes are for the base.
"""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """An adapter as it describes itself, and what its users ask about."""

    name: str
    description: str
    things: tuple[str, ...]

    @property
    def prompts(self) -> list[str]:
        """Ten prompts: each thing in two of the templates."""
        ways = [_WAYS[2 * index : 2 * index + 2] for index in range(len(self.things))]
        return [way.format(thing) for thing, two in zip(self.things, ways, strict=True) for way in two]


_WAYS = (
    "Tell me about {}.",
    "I have a question concerning {}, can you help?",
    "What should I know about {}?",
    "Please write two sentences on {}.",
    "A colleague asked me to explain {}.",
    "How does one deal with {}?",
    "Give me some advice on {}.",
    "Could you summarise the main points of {}?",
    "We are having trouble with {}. What now?",
    "Make a short list of facts about {}.",
)

_LINES = """
cardiology | explains diseases of the heart and their treatment
    atrial fibrillation; a blocked artery; chest pain and palpitations; a pacemaker; high blood pressure
dermatology | answers questions about skin complaints
    eczema on the hands; a mole that has changed; teenage acne; sunburn; psoriasis
dentistry | gives advice about teeth and gums
    a root canal; wisdom teeth; a cracked molar; bleeding when flossing; braces for adults
nutrition | plans diets and healthy meals
    protein intake; a vegan menu for a week; cutting down on sugar; vitamin deficiency; calories in nuts
fitness | writes training plans for sport and exercise
    bench presses; running a first marathon; stretching after a workout; building muscle; interval sprints
contracts | drafts and reviews clauses of legal agreements
    a non-disclosure agreement; an indemnity clause; termination notice periods; breach of warranty; governing law
tax | helps with income tax returns and deductions
    capital gains; deductible travel expenses; value added tax; filing deadlines for freelancers; inheritance duty
immigration | explains visas and residence permits
    a work visa; applying for asylum; citizenship tests; a spouse permit; overstaying a tourist stamp
family-law | answers questions on divorce and custody
    alimony; child support; a prenuptial agreement; visiting rights of grandparents; adoption papers
patents | searches and drafts patent claims
    prior art; an invention disclosure; infringement of a utility model; licensing royalties; novelty and inventive step
sql | writes database queries in SQL
    joining two tables; GROUP BY and HAVING; a slow SELECT statement; indexes on a column; counting orders per customer
python | writes and debugs Python programs
    a list comprehension; a TypeError in my function; decorators; asyncio tasks; reading CSV with pandas
javascript | builds web pages with JavaScript and TypeScript
    React hooks; a promise that never resolves; DOM events; npm packages; arrow functions
rust | explains the Rust language and its compiler
    the borrow checker; lifetimes in structs; cargo crates; traits and generics; unsafe blocks
devops | sets up containers, pipelines and clusters
    a Kubernetes deployment; Dockerfiles; continuous integration; Terraform modules; rolling back a release
security | finds and explains computer vulnerabilities
    SQL injection; a phishing mail; cross-site scripting; password hashing; a firewall rule
networking | troubleshoots routers and internet connections
    DNS resolution; a subnet mask; packet loss on wifi; BGP routes; configuring a VPN tunnel
statistics | explains statistical tests and regression
    p-values; a confidence interval; logistic regression; standard deviation; Bayesian priors
calculus | solves problems of derivatives and integrals
    the chain rule; a limit at infinity; integration by parts; Taylor series; partial differentiation
geometry | proves theorems about shapes and angles
    the Pythagorean theorem; inscribed circles; congruent triangles; the volume of a cone; parallel lines
physics | explains mechanics, electricity and light
    Newton's laws; magnetic fields; refraction in a prism; angular momentum; semiconductors
chemistry | balances reactions and explains compounds
    oxidation of iron; covalent bonds; titrating an acid; the periodic table; polymers
biology | explains cells, genes and evolution
    photosynthesis; DNA replication; natural selection; mitochondria; bacteria and antibodies
astronomy | answers questions about stars and planets
    black holes; the rings of Saturn; a lunar eclipse; red giants; the Hubble telescope
geology | explains rocks, earthquakes and volcanoes
    plate tectonics; sedimentary layers; magma chambers; quartz crystals; seismic waves
weather | forecasts and explains the weather
    a cold front; hurricanes; tomorrow's chance of rain; humidity and dew; thunderstorms
gardening | gives advice on plants and gardens
    pruning roses; compost; tomatoes in pots; slugs on lettuce; when to sow a lawn
cooking | suggests recipes and cooking techniques
    a risotto; braising beef; whisking egg whites; sourdough bread; a curry for six people
wine | recommends wines and explains vineyards
    a dry Riesling; tannins; decanting a Bordeaux; a bottle for roast lamb; champagne vintages
travel | plans trips and itineraries
    three days in Lisbon; cheap flights to Tokyo; hotels near the beach; a rail pass; packing for the Andes
history | tells about events of the past
    the French Revolution; the fall of Rome; the Cold War; Genghis Khan; the Black Death
philosophy | discusses ethics and great thinkers
    Kant's categorical imperative; Plato's cave; free will; utilitarianism; existentialism
religion | explains faiths, scriptures and rites
    Ramadan; the Sermon on the Mount; karma and rebirth; Hanukkah; Buddhist monks
poetry | writes poems in verse and rhyme
    a sonnet for my mother; a haiku on autumn; metaphors for the sea; a ballad of two lovers; iambic pentameter
fiction | writes short stories and characters
    a detective in the rain; a plot twist; dialogue between two spies; a dragon's childhood; an unreliable narrator
film | reviews movies and actors
    Hitchcock's thrillers; the Oscar for best director; the plot of Casablanca; science fiction sequels; heist films
music | explains harmony, instruments and composers
    a minor seventh chord; Bach fugues; tuning a violin; jazz improvisation; the sonata form
painting | describes paintings and art styles
    Impressionism; Rembrandt's portraits; mixing oil colours; cubism; watercolour brushes
football | reports on soccer matches and players
    an offside goal; the World Cup final; a penalty shoot-out; Messi's transfer; relegation from the league
chess | analyses chess games and openings
    the Sicilian Defence; a knight fork; rook endgames; castling too late; checkmate in three
cars | diagnoses and compares cars
    a rattling exhaust; brake pads; hybrid engines; an oil change; tyre pressure in winter
aviation | explains aircraft and flying
    stalling at low speed; wing flaps; a pilot's licence; jet turbines; air traffic control
banking | answers customers about accounts and loans
    a fixed-rate mortgage; an overdraft; a blocked debit card; transferring money abroad; savings interest
investing | explains shares, funds and portfolios
    dividend stocks; index funds; short selling; bond yields; diversifying a pension
insurance | handles insurance policies and claims
    a damaged windscreen; liability cover; a deductible; theft of a bicycle; flood damage to a house
support | answers customer tickets about orders and deliveries
    a parcel that never came; a refund; a wrong invoice; returning a broken toaster; a new delivery address
hiring | writes job advertisements and interviews candidates
    a CV for a nurse; salary negotiation; a rejection letter; onboarding a trainee; questions for a team lead
translation-french | translates text between English and French
    how to say good evening in Paris; subjunctive in français; bonjour; a letter to Monsieur Dupont; fromage
translation-german | translates text between English and German
    the word Schmetterling; der, die and das; Guten Morgen; an email to Herr Müller; umlauts in Österreich
parenting | advises parents of small children
    a toddler's tantrums; potty training; bedtime for a baby; siblings who fight; screen time at six
"""


def _topics(lines: list[str]) -> tuple[Topic, ...]:
    found = []
    for head, things in zip(lines[::2], lines[1::2], strict=True):
        name, _, description = head.partition(" | ")
        found.append(Topic(name, description, tuple(thing.strip() for thing in things.split(";"))))
    return tuple(found)


TOPICS = _topics(_LINES.strip().splitlines())
