module semel.example/semel

go 1.19
