"""A payment API, three times over one business module: FastAPI, Flask and Django.

python -m examples.payments.on_fastapi --port 8000
python -m examples.payments.on_flask --port 8000
python -m examples.payments.on_django --port 8000

POST /payments           {"account": "ann", "amount": 500, "currency": "EUR"}     needs a key
POST /payments/7/refund  {}                                                       needs a key
GET  /payments/7
"""
