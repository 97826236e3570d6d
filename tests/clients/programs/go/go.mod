module program

go 1.19

require semel.example/semel v0.0.0

replace semel.example/semel => ../../../../clients/go
